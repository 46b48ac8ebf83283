"""Checks of a cluster before anything is started: does it answer, and is it configured for blocks?"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from kvtier.errors import ConfigError, ProtocolError, TierError
from kvtier.stores.valkey.config import ClusterConfig
from kvtier.stores.valkey.node import NodeAccess, NodeAddress, NodeConnection, is_loopback
from kvtier.stores.valkey.resp import Reply, ReplyError, command
from kvtier.stores.valkey.slots import nodes_of, read_slots

_ANSWER_S = 2.0
_ALL_S = 20.0
_OLDEST = (8, 0)
_COPY_FREE = (9, 0)
_SETTINGS = (b"maxmemory", b"maxmemory-policy", b"cluster-require-full-coverage", b"io-threads")


def notes_on_cluster(config: ClusterConfig) -> Iterator[str]:
    """A sentence for each thing that an operator should know. Takes seconds without an answer, twenty at most."""
    try:
        access = config.access()
    except ConfigError as error:
        yield str(error)
        return
    until = time.monotonic() + _ALL_S
    for seed in config.seeds:
        deadline = time.monotonic() + _ANSWER_S
        if deadline > until:
            break
        try:
            connection = NodeConnection(seed, access, deadline)
            try:
                owners = read_slots(connection.ask(command(b"CLUSTER", b"SLOTS"), deadline), seed)
            finally:
                connection.close()
        except (TierError, ProtocolError) as error:
            yield f"cluster: {error}"
            continue
        if None in owners:
            yield f"cluster: {owners.count(None)} of its slots have no node: their blocks are misses"
        for node in sorted(nodes_of(owners), key=str):
            if time.monotonic() + _ANSWER_S > until:
                yield "cluster: asking all of its nodes took too long: the others were not checked"
                break
            yield from _notes_on_node(node, access)
        return
    yield "cluster: no node answers: engines go on without it until one does"


def _notes_on_node(node: NodeAddress, access: NodeAccess) -> Iterator[str]:
    deadline = time.monotonic() + _ANSWER_S
    try:
        connection = NodeConnection(node, access, deadline)
        try:
            hello = connection.call(command(b"HELLO", b"3"), deadline)
            settings = connection.call(command(b"CONFIG", b"GET", *_SETTINGS), deadline)
        finally:
            connection.close()
    except (TierError, ProtocolError) as error:
        yield f"cluster: {error}"
        return
    yield from _notes_on_version(node, _pairs(hello))
    if isinstance(settings, ReplyError):
        yield f"cluster: the user may not see the settings of {node} (CONFIG GET), so they were not checked"
        return
    yield from _notes_on_settings(node, _pairs(settings))


def _notes_on_version(node: NodeAddress, hello: dict[str, str]) -> Iterator[str]:
    name, version = hello.get("server", ""), hello.get("version", "")
    numbers = tuple(int(number) if number.isdecimal() else 0 for number in version.split(".")[:2])
    if name == "valkey" and numbers < _OLDEST:
        yield f"cluster: {node} runs Valkey {version}; 8.0 is the oldest that is used with kvtier"
    elif name == "valkey" and numbers < _COPY_FREE:
        yield f"cluster: {node} runs Valkey {version}; 9 sends large values without a copy"


def _notes_on_settings(node: NodeAddress, settings: dict[str, str]) -> Iterator[str]:
    if settings.get("maxmemory") == "0":
        yield f"cluster: {node} has maxmemory 0: it takes memory without end"
    policy = settings.get("maxmemory-policy", "")
    if policy == "noeviction":
        yield f"cluster: {node} has maxmemory-policy noeviction: once it is full it takes no block; set volatile-ttl"
    elif policy != "volatile-ttl":
        yield f"cluster: {node} has maxmemory-policy {policy}; with volatile-ttl a prompt loses its end first"
    if settings.get("cluster-require-full-coverage") == "yes":
        yield f"cluster: {node} has cluster-require-full-coverage yes: one lost node stops all of them; set no"
    threads = settings.get("io-threads", "1")
    if is_loopback(node.host) and threads.isdecimal() and int(threads) >= max(2, os.cpu_count() or 1):
        yield f"cluster: {node} has io-threads {threads}, as many as this host has cores: they wait for each other"


def _pairs(reply: Reply) -> dict[str, str]:
    """A map of texts, without values that are not text."""
    if not isinstance(reply, list):
        return {}
    names, values = reply[::2], reply[1::2]
    return {
        name.decode(errors="replace"): value.decode(errors="replace")
        for name, value in zip(names, values, strict=False)
        if isinstance(name, bytes) and isinstance(value, bytes)
    }
