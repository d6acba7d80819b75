//! Message framing: one byte of kind, four bytes of length (little-endian), payload.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// From rank 0 to all.
pub(super) const SHARE: u8 = b's';
/// An error; the receiver must end.
pub(super) const FAILED: u8 = b'f';
/// A number to compare; from rank 0 the maximum.
pub(super) const NUMBER: u8 = b'n';
/// The sender is done, and sends no more.
pub(super) const DONE: u8 = b'd';
/// Maximum bytes of a message.
const LONGEST: usize = 64 << 20;

pub(super) fn transmit(mut stream: &TcpStream, kind: u8, bytes: &[u8]) -> io::Result<()> {
    let mut message = vec![kind];
    message.extend((bytes.len() as u32).to_le_bytes());
    message.extend(bytes);
    stream.write_all(&message)
}

pub(super) fn receive(mut stream: &TcpStream) -> io::Result<(u8, Vec<u8>)> {
    let mut head = [0; 5];
    stream.read_exact(&mut head)?;
    let [kind, length @ ..] = head;
    let length = u32::from_le_bytes(length) as usize;
    if length > LONGEST {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes)?;
    Ok((kind, bytes))
}

/// Tells processes to end, with a reason.
pub(super) fn refuse(peers: &[(usize, TcpStream)], reason: &str) {
    for (_, stream) in peers {
        let _ = transmit(stream, FAILED, reason.as_bytes());
    }
}

/// The error for a silent rank `rank`.
pub(super) fn lost(rank: usize, error: &io::Error, timeout: Duration) -> String {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            format!("rank {rank} did not answer within {} s", timeout.as_secs_f64())
        }
        _ => format!("rank {rank} ended, or its machine cannot be reached ({error})"),
    }
}
