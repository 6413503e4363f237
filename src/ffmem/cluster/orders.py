"""Orders: what all workers of one piece of work do alike, laid out in the shared folder.

So a worker anywhere needs nothing but the place of that folder.
"""

import json
from dataclasses import dataclass
from typing import TypeVar

from ffmem.cluster.shared import SharedFolder
from ffmem.errors import StoreError
from ffmem.records import NotARecord, Record

NAME = "orders.json"

AnyOrders = TypeVar("AnyOrders", bound="Orders")


@dataclass(frozen=True, kw_only=True)
class Orders(Record):
    """Base of all orders: a record that is written for others."""

    def write(self, shared: SharedFolder) -> None:
        """Lay the orders out for all workers."""
        shared.write_text(NAME, self.to_json())

    @classmethod
    def read(cls: type[AnyOrders], shared: SharedFolder) -> AnyOrders:
        """Return the orders that lie in a shared folder."""
        text = shared.read_text(NAME)
        if text is None:
            raise StoreError(
                f"There are no orders in {shared.shown}. Workers must see the folder where they"
                " meet: put it on a disk that all of them share, or give --shared."
            )
        try:
            return cls.of(json.loads(text))
        except (ValueError, NotARecord) as error:
            raise StoreError(
                f"The orders in {shared.shown} are of another version of ffmem ({error})."
                " Use the same version everywhere."
            ) from None
