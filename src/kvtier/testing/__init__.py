"""For tests of kvtier and of software built on it: contract suites, fault wrappers, leak checks, real servers."""
