"""The cache server's protocol: frames, messages, session. No sockets, no threads."""
