"""What a deployment needs, and what this machine has."""
