"""The maths of the extended dropout family: pure functions of tensors."""
