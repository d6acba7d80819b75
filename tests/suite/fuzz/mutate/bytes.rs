//! Mutations of bytes, independent of their meaning.

use super::{NUMBERS, changes, pick};
use crate::machine::Random;

/// Makes a few changes; some with pieces of another input.
pub(in crate::fuzz) fn change(random: &mut Random, bytes: &mut Vec<u8>, other: &[u8]) {
    for _ in 0..changes(random) {
        once(random, bytes, other);
    }
}

fn once(random: &mut Random, bytes: &mut Vec<u8>, other: &[u8]) {
    let at = random.below(bytes.len() + 1);
    let len = random.below(32).min(bytes.len() - at);
    match random.below(9) {
        0 => bytes.truncate(at),
        1 => drop(bytes.drain(at..at + len)),
        2 => {
            let piece = bytes[at..at + len].to_vec();
            let to = random.below(bytes.len() + 1);
            bytes.splice(to..to, piece);
        }
        3 => {
            let number = pick(random, &NUMBERS).to_le_bytes();
            let size = [1, 2, 4, 8][random.below(4)].min(bytes.len() - at);
            bytes[at..at + size].copy_from_slice(&number[..size]);
        }
        4 => {
            let noise: Vec<u8> =
                (0..1 + random.below(16)).map(|_| random.below(256) as u8).collect();
            bytes.splice(at..at, noise);
        }
        5 => bytes[at..at + len].fill(random.below(256) as u8),
        6 => {
            let from = random.below(other.len() + 1);
            let piece = &other[from..(from + random.below(64)).min(other.len())];
            bytes.splice(at..at + len, piece.iter().copied());
        }
        _ if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
        _ => {}
    }
}
