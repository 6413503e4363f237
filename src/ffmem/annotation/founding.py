"""The first rows of a study: its settings, people with their codes, items, assignments."""

import json
import secrets
from datetime import UTC, datetime

from sqlalchemy.orm import Session

from ffmem.annotation.plan import Plan
from ffmem.annotation.tables import AssignmentRow, ItemRow, PersonRow, StudyRow


def found_study(session: Session, plan: Plan) -> None:
    """Add everything that was planned; adjudicators meet the items in the order of their keys."""
    session.add(StudyRow(settings=json.dumps(plan.settings), created_at=datetime.now(UTC)))
    annotators = [_person(name, "annotator") for name in plan.orders]
    adjudicators = [_person(name, "adjudicator") for name in plan.adjudicators]
    # Rows by their keys: even the numbers of rows then tell nothing.
    items = sorted(plan.items, key=lambda item: item.key)
    rows = [
        ItemRow(
            key=item.key,
            kind=item.kind,
            cell=item.cell,
            sign=item.sign,
            # As ASCII: a database may refuse some characters that a text can hold.
            texts=json.dumps(item.texts),
            words=json.dumps(item.words) if item.words else None,
        )
        for item in items
    ]
    session.add_all([*annotators, *adjudicators])
    session.add_all(rows)
    session.flush()
    ids = {row.key: row.id for row in rows}
    for person in annotators:
        session.add_all(
            AssignmentRow(item_id=ids[key], person_id=person.id, place=place)
            for place, key in enumerate(plan.orders[person.name], start=1)
        )
    session.add_all(
        AssignmentRow(item_id=row.id, person_id=None, place=place)
        for place, row in enumerate(rows, start=1)
    )


def _person(name: str, role: str) -> PersonRow:
    return PersonRow(name=name, code=secrets.token_urlsafe(16), role=role)
