"""The exceptions of a transactional producer: one class for each thing that a program must do (KIP-1050).

Invariant: an error that ends a transaction is of exactly one of these classes, so that a program
never has to compare error codes.
"""

from __future__ import annotations

from tidelog.protocol.errors import KafkaError


class TransactionError(KafkaError):
    """The base of the exceptions below."""


class TransactionAbortable(TransactionError):
    """The transaction cannot be committed. Abort it; the same producer may begin the next one."""


class TransactionAborted(TransactionError):
    """The result of a record that was not sent, because its transaction was aborted before."""


class TransactionTimeout(TransactionError):
    """The call did not end within `max_block_ms`. It goes on in the background and may be repeated.

    After a commit the outcome is not known: repeat `commit_transaction` to learn it.
    """


class TransactionFatal(TransactionError):
    """This producer can do nothing more. Close it, and continue with a new one."""


class ProducerFenced(TransactionFatal):
    """Another producer has taken over the transactional id, or the transaction outlived its timeout."""
