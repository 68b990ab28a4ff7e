"""What peers agree on: run spec, records, plan, messages, limits, errors and the four ports."""
