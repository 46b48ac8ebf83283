"""An engine in a process of its own, and the messages on its socket."""
