"""What a deployment consists of, worked out from its file."""
