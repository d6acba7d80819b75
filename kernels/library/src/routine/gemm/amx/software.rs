//! Tile registers in memory, for the tests: each instruction as Intel's manual defines it.

use super::{SIDE, Tiles, WORDS};
use std::cell::RefCell;

/// Registers of a thread.
pub(super) struct Software;

type Register = [[u32; WORDS]; SIDE];

thread_local! {
    static REGISTERS: RefCell<Option<Box<[Register; 8]>>> = const { RefCell::new(None) };
}

/// Calls a function with the registers, which must be configured.
fn with<R>(body: impl FnOnce(&mut [Register; 8]) -> R) -> R {
    REGISTERS.with_borrow_mut(|r| body(r.as_mut().expect("the registers are configured")))
}

impl Tiles for Software {
    fn configure() {
        let before = REGISTERS.replace(Some(Box::new([[[0; WORDS]; SIDE]; 8])));
        assert!(before.is_none(), "the registers are configured twice");
    }

    fn release() {
        assert!(REGISTERS.take().is_some(), "the registers were not configured");
    }

    unsafe fn zero<const T: u8>() {
        with(|registers| registers[usize::from(T)] = [[0; WORDS]; SIDE]);
    }

    unsafe fn load<const T: u8>(from: *const u32, stride: usize) {
        with(|registers| {
            for (i, row) in registers[usize::from(T)].iter_mut().enumerate() {
                // SAFETY: the caller vouches for the rows.
                *row = unsafe { from.byte_add(i * stride).cast::<[u32; WORDS]>().read() };
            }
        });
    }

    unsafe fn load_passing<const T: u8>(from: *const u32, stride: usize) {
        // SAFETY: passed on.
        unsafe { Software::load::<T>(from, stride) };
    }

    unsafe fn dot<const C: u8, const A: u8, const B: u8>() {
        with(|registers| {
            let [a, b] = [A, B].map(|register| registers[usize::from(register)]);
            add_products(&mut registers[usize::from(C)], &a, &b);
        });
    }

    unsafe fn store<const T: u8>(to: *mut f32, stride: usize) {
        with(|registers| {
            for (i, row) in registers[usize::from(T)].iter().enumerate() {
                // SAFETY: the caller vouches for the rows.
                unsafe { to.byte_add(i * stride).cast::<[u32; WORDS]>().write(*row) };
            }
        });
    }
}

crate::simd::vectorized! {
    fn add_products(c: &mut Register, a: &Register, b: &Register) {
        for (c, a) in c.iter_mut().zip(a) {
            let mut sums = [[0f32; WORDS]; 2];
            for (a, b) in a.iter().zip(b) {
                for (half, sums) in sums.iter_mut().enumerate() {
                    let x = number(*a, half);
                    for (sum, b) in sums.iter_mut().zip(b) {
                        *sum = flushed(x.mul_add(number(*b, half), *sum));
                    }
                }
            }
            let [even, odd] = sums;
            for ((c, even), odd) in c.iter_mut().zip(even).zip(odd) {
                let sum = flushed(f32::from_bits(*c)) + flushed(even + odd);
                *c = flushed(sum).to_bits();
            }
        }
    }
}

/// A bf16 number of a pair.
#[inline(always)]
fn number(pair: u32, half: usize) -> f32 {
    flushed(f32::from_bits(pair >> (16 * half) << 16))
}

/// Zero of the same sign instead of a subnormal number, as operand or result.
#[inline(always)]
fn flushed(x: f32) -> f32 {
    const SIGN: u32 = 1 << 31;
    let kept = if x.abs() < f32::MIN_POSITIVE { SIGN } else { u32::MAX };
    f32::from_bits(x.to_bits() & kept)
}
