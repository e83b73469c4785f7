# SPDX-License-Identifier: Apache-2.0
"""Other people's names for our call: thin adapters, imported one by one, without arithmetic of their own."""
