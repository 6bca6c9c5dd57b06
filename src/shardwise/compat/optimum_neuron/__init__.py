"""Optimum Neuron (`optimum.neuron`) over ours; see docs/migrate."""

from shardwise.compat.optimum_neuron import distributed as distributed
