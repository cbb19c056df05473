"""The prefix cache: keys and values of earlier requests, for prompts that begin like them.

The next turn of a conversation begins with the turns before it, and questions with the same solved
examples begin alike. Their keys and values are kept in a tree of blocks: a node holds those of
``BLOCK`` tokens, and the path to it spells all tokens before, which they depend on. A prompt is
compared token by token, so nothing is shared by mistake.

Shapes: G = key/value heads, D = head dimension of the cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from prime_rl_embedded.kv import KVCache

BLOCK = 16
"""Tokens of a node. The rest of a prompt, up to ``BLOCK`` tokens, is computed again."""

Tokens = tuple[int, ...]


@dataclass(eq=False)
class Node:
    """``BLOCK`` tokens after those of its parents."""

    parent: Node | None
    tokens: Tokens
    layers: list[Tensor]
    """[2, G, BLOCK, D] each, and the routes if they are recorded. Empty: a root."""
    children: dict[Tokens, Node] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(layer.numel() * layer.element_size() for layer in self.layers)


class PrefixCache:
    """Blocks of at most ``max_bytes``; those not used for longest make room. 0 keeps nothing."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._roots: dict[str | None, Node] = {}
        """By salt: requests of different salts share nothing."""
        self._used: OrderedDict[Node, None] = OrderedDict()
        """All nodes, those not used for longest first. A node stands before its parent, so the
        first one has no children."""

    def find(self, salt: str | None, prompt: Sequence[int]) -> list[Node]:
        """The longest known path, without the prompt's last token: its logits are needed."""
        path = []
        node = self._roots.get(salt)
        for tokens in _blocks(prompt[:-1]) if node is not None else ():
            node = node.children.get(tokens) if node is not None else None
            if node is None:
                break
            path.append(node)

        self._use(path)
        return path

    def store(self, cache: KVCache, row: int, salt: str | None, tokens: Sequence[int]) -> None:
        """Keep the first ``len(tokens)`` positions of a row, in whole blocks."""
        if len(tokens) < BLOCK:
            return
        node = self._roots.setdefault(salt, Node(None, (), []))
        path = []
        for index, block in enumerate(_blocks(tokens)):
            if block not in node.children:
                place = slice(index * BLOCK, (index + 1) * BLOCK)
                kept = [layer[:, row, :, place].clone() for layer in cache.tensors]
                node.children[block] = Node(node, block, kept)
                self.num_bytes += node.children[block].num_bytes
            node = node.children[block]
            path.append(node)

        self._use(path)
        self._drop_oldest()

    def clear(self) -> None:
        """Forget everything: the weights changed."""
        self._roots.clear()
        self._used.clear()
        self.num_bytes = 0

    def _use(self, path: Sequence[Node]) -> None:
        for node in reversed(path):
            self._used[node] = None
            self._used.move_to_end(node)

    def _drop_oldest(self) -> None:
        while self.num_bytes > self.max_bytes:
            node, _ = self._used.popitem(last=False)
            assert node.parent is not None and not node.children
            del node.parent.children[node.tokens]
            self.num_bytes -= node.num_bytes
        for salt in [salt for salt, root in self._roots.items() if not root.children]:
            del self._roots[salt]


def restore(cache: KVCache, row: int, path: Sequence[Node]) -> None:
    """Copy a path's keys and values to the row's first positions."""
    for index, node in enumerate(path):
        place = slice(index * BLOCK, (index + 1) * BLOCK)
        for layer, kept in zip(cache.tensors, node.layers, strict=True):
            layer[:, row, :, place] = kept


def _blocks(tokens: Sequence[int]) -> Iterator[Tokens]:
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        yield tuple(tokens[start : start + BLOCK])
