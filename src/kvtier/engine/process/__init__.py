"""An engine in a process of its own, and what it says over its socket."""
