"""What a draft head is: the contract, the kinds, the frozen target, recorded paths and export."""
