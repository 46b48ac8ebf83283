"""A whole deployment: what its file says, the parts that follow from it, and who keeps them running."""
