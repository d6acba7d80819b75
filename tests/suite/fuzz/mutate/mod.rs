//! Mutations of inputs, all drawn from one generator.

mod bytes;
mod configuration;
mod protobuf;
mod tensors;
mod text;
mod value;

use crate::machine::Random;

pub(super) use bytes::change as change_bytes;
pub(super) use configuration::change as change_configuration;
pub(super) use protobuf::change as change_protobuf;
pub(super) use tensors::{change_archive, change_safetensors};
pub(super) use text::change as change_text;
pub(super) use value::change as change_value;

/// Numbers at the edges of what is representable or sensible.
const NUMBERS: [i64; 24] = [
    0,
    1,
    -1,
    2,
    3,
    7,
    8,
    -2,
    16,
    100,
    127,
    128,
    255,
    1 << 15,
    (1 << 16) + 1,
    1 << 20,
    i32::MAX as i64,
    i32::MIN as i64,
    1 << 32,
    1 << 40,
    (1 << 53) + 1,
    1 << 62,
    i64::MAX,
    i64::MIN,
];

fn pick<'a, T>(random: &mut Random, all: &'a [T]) -> &'a T {
    &all[random.below(all.len())]
}

/// How many changes are made: mostly one, so that what was right stays so.
fn changes(random: &mut Random) -> usize {
    [1, 1, 1, 1, 2, 3][random.below(6)]
}

/// A small number, one at an edge, or one near what stood there.
fn number(random: &mut Random, old: i64) -> i64 {
    match random.below(6) {
        0 => old.wrapping_add(1),
        1 => old.wrapping_sub(1),
        2 => old.wrapping_mul(2),
        3 | 4 => random.below(9) as i64 - 1,
        _ => *pick(random, &NUMBERS),
    }
}
