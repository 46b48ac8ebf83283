"""How much cache is worth buying: traces of a deployment's traffic, and what memory and disk of each size would do."""
