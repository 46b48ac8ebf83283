"""kvtier inside other inference engines. Each file is imported only in its engine's process."""
