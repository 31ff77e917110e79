"""Token movement: tokens to expert-sorted rows and back."""
