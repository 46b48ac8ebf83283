"""For tests of kvtier and of what is built on it: contract suites, fault wrappers, leak checks, real servers."""
