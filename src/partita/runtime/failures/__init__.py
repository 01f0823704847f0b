"""Who is alive: news between ranks, what they wait for, and what is said when one is gone."""
