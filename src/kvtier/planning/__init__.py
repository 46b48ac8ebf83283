"""How much cache is worth buying: records traffic, and predicts the effect of memory and disk of each size."""
