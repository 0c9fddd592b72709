"""Parts of `tools/train_multinode.sh`: the agreement of the hosts before any rank starts."""
