"""Running a model: batches, memory, vocabulary, sampling."""
