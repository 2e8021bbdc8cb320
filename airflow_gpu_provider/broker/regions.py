"""Which request classes have to do with one another: those that share kinds of devices, or nodes.

Kinds are bits of a number. What happens to devices of some kinds can unblock the classes that use them, and
these give up what they hold for others, so a turn walks along all that hang together; what has nothing to
do with it is not looked at. The next step is the turn of `engine.Engine`.
"""

from __future__ import annotations

from collections.abc import Iterable

from airflow_gpu_provider.broker.capacity import Part
from airflow_gpu_provider.broker.layout import Layout
from airflow_gpu_provider.broker.pending import ClaimClass
from airflow_gpu_provider.broker.quota import Team


class Regions:
    """The kinds of one layout."""

    def __init__(self, layout: Layout) -> None:
        self._kind_of: list[int] = layout.kind_of.tolist()
        self._of_node = [0] * len(layout.nodes)
        for bank, node in enumerate(layout.node_of.tolist()):
            self._of_node[node] |= 1 << self._kind_of[bank]
        #: the kinds that share a node with a kind, by its number
        self._beside = [1 << kind for kind in range(len(layout.kinds))]
        for kinds in set(self._of_node):
            for kind in range(len(layout.kinds)):
                if kinds >> kind & 1:
                    self._beside[kind] |= kinds

    def of_kinds(self, kinds: Iterable[int]) -> int:
        """Return these kinds and those beside them, whose cores they share."""
        found = 0
        for kind in kinds:
            found |= self._beside[kind]
        return found

    def of_part(self, part: Part) -> int:
        """Return the kinds of the nodes of a part."""
        found = 0
        for node, _, _ in part.nodes:
            found |= self._of_node[node]
        return found

    def around(self, kinds: int, teams: set[Team] | None, classes: Iterable[ClaimClass]) -> list[ClaimClass]:
        """Return the classes that have to do with these kinds, directly or by way of one another.

        With quotas the classes of a team have to do with one another too, for what one gets moves the others
        back; ``teams`` are those whose devices changed, None = there are no quotas.
        """
        found: list[ClaimClass] = []
        rest = list(classes)
        teams = None if teams is None else set(teams)
        grows = True
        while grows and rest:
            near: list[ClaimClass] = []
            far: list[ClaimClass] = []
            for each in rest:
                is_near = each.kinds & kinds or (teams is not None and each.key.team in teams)
                (near if is_near else far).append(each)
            found, rest, grows = found + near, far, bool(near)
            for each in near:
                kinds |= each.kinds
                if teams is not None:
                    teams.add(each.key.team)
        return found
