"""The paper's tables, and the chain of trainings and evaluations that makes them."""
