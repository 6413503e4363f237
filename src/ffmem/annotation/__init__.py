"""The paper's annotation protocol for people: studies, sheets, agreement, adjudication."""
