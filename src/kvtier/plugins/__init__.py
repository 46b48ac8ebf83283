"""kvtier inside engines that people run already. Each file is imported only in its engine's process."""
