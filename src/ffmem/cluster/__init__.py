"""Work in many hands: tasks, who does them, and what happens when one fails."""
