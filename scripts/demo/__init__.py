"""The parts of the demo model: a small text grammar, its words and facts, the composers, and the model that is
trained."""
