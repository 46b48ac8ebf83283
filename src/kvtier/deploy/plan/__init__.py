"""The parts of a deployment, derived from its file."""
