"""The transaction coordinator: transactional ids, their producers, and the state of their transactions."""
