"""Any two hosts: `TcpSender` on the prefill node, `TcpReceiver` on the decode node."""

from kv_transfer.transport.tcp_receiver import TcpReceiver
from kv_transfer.transport.tcp_sender import TcpSender

__all__ = ["TcpReceiver", "TcpSender"]
