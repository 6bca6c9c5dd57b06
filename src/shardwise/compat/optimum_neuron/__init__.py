"""Optimum Neuron (`optimum.neuron`) on top of ours; see docs/migrate."""

from shardwise.compat.optimum_neuron import distributed as distributed
