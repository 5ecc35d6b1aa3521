# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""What a host sends to other hosts in a step, of the bytes of all gradients and all parameters."""


def flat_bytes(hosts, ranks_per_host, gradients, parameters):
    """Each rank exchanges rows with each rank elsewhere."""
    return ranks_per_host * (gradients + parameters) * (1 - 1 / hosts)


def two_level_bytes(hosts, _, gradients, parameters):
    """Each row passes between two hosts once. No exchange of rows sends less."""
    return (gradients + parameters) * (1 - 1 / hosts)


# The formula of the library's exchange, which measured bytes have to match.
expected_bytes = two_level_bytes
