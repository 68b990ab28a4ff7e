"""This package defines what peers agree on: run spec, records, plan, messages, limits, errors and the five ports."""
