"""The paper's model in small, `mini-wiki`, and a text that it can read, inside the package."""
