"""Around a step: clipping, loss scaling, and the uncut model to compare with."""
