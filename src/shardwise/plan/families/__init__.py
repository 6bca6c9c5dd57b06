"""Corrections to declared plans, a family at a time: data only, each rule with its reason."""
