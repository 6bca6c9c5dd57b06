"""Optimum Neuron (`optimum.neuron`) over ours; see docs/migrate."""
