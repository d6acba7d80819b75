//! The instructions as encoded, and the registers in memory against single cases of the manual's definition.

use super::software::Software;
use super::{Hardware, ROW_BYTES, SIDE, Tiles, WORDS};

/// The code of a function that is compiled by itself, and what follows.
fn code(function: *const ()) -> [u8; 64] {
    // SAFETY: code of this program is readable, and does not end within 64 bytes of a function of these.
    unsafe { function.cast::<[u8; 64]>().read() }
}

/// Where an instruction with these opcode bytes is, of which the second says which half of the registers its address has.
fn find(code: &[u8], opcode: [u8; 4]) -> Option<usize> {
    code.windows(5)
        .position(|w| w[0] == opcode[0] && w[1] & 0x1f == opcode[1] && w[2..4] == opcode[2..])
}

/// The bytes are those that the manual's tables give: `VEX.128.{NP,F2,F3}.0F38.W0 {49,4B,5C}`.
#[test]
fn instructions_are_encoded_as_in_the_manual() {
    let dot = code(Hardware::dot::<0, 4, 6> as *const ());
    assert!(dot.windows(5).any(|w| w == [0xc4, 0xe2, 0x4a, 0x5c, 0xc4]), "{dot:x?}");
    let dot = code(Hardware::dot::<3, 5, 7> as *const ());
    assert!(dot.windows(5).any(|w| w == [0xc4, 0xe2, 0x42, 0x5c, 0xdd]), "{dot:x?}");
    let zero = code(Hardware::zero::<2> as *const ());
    assert!(zero.windows(5).any(|w| w == [0xc4, 0xe2, 0x7b, 0x49, 0xd0]), "{zero:x?}");
    let release = code(Hardware::release as *const ());
    assert!(release.windows(5).any(|w| w == [0xc4, 0xe2, 0x78, 0x49, 0xc0]), "{release:x?}");
    for (name, code, opcode, register) in [
        ("load", code(Hardware::load::<5> as *const ()), [0xc4, 0x02, 0x7b, 0x4b], 5),
        (
            "passing load",
            code(Hardware::load_passing::<6> as *const ()),
            [0xc4, 0x02, 0x79, 0x4b],
            6,
        ),
        ("store", code(Hardware::store::<3> as *const ()), [0xc4, 0x02, 0x7a, 0x4b], 3),
    ] {
        let at = find(&code, opcode).unwrap_or_else(|| panic!("{name}: {code:x?}"));
        // An address of two registers: mode 0, or 1 with a displacement of zero, and a SIB byte.
        assert_eq!(code[at + 4] & 0x3f, register << 3 | 4, "{name}: {code:x?}");
    }
    let configure = code(Hardware::configure as *const ());
    let at = find(&configure, [0xc4, 0x02, 0x78, 0x49]).expect("ldtilecfg");
    assert_eq!(configure[at + 4] >> 3 & 7, 0, "{configure:x?}");
}

/// The first number of a product of registers: of pairs, from what was there.
fn first(before: f32, pairs: &[[f32; 4]]) -> f32 {
    let bits = |x: f32| x.to_bits() >> 16;
    let (mut a, mut b) = ([[0u32; WORDS]; SIDE], [[0u32; WORDS]; SIDE]);
    let mut c = [[0f32; WORDS]; SIDE];
    c[0][0] = before;
    for (k, [a_low, a_high, b_low, b_high]) in pairs.iter().enumerate() {
        a[0][k] = bits(*a_low) | bits(*a_high) << 16;
        b[k][0] = bits(*b_low) | bits(*b_high) << 16;
    }
    Software::configure();
    // SAFETY: the registers are configured, and all rows have their size.
    unsafe {
        Software::load::<0>(c.as_ptr().cast(), ROW_BYTES);
        Software::load::<1>(a.as_ptr().cast(), ROW_BYTES);
        Software::load::<2>(b.as_ptr().cast(), ROW_BYTES);
        Software::dot::<0, 1, 2>();
        Software::store::<0>(c.as_mut_ptr().cast(), ROW_BYTES);
    }
    Software::release();
    assert!(c.as_flattened()[1..].iter().all(|x| *x == 0.0));
    c[0][0]
}

#[test]
fn registers_in_memory_add_as_the_manual_says() {
    assert_eq!(first(10.0, &[[2.0, 3.0, 5.0, 7.0], [1.0, 0.0, 4.0, 9.0]]), 45.0);
    // Even and odd depths are added apart, so the large numbers of the odd ones cancel before the small sum is lost.
    let large = 2f32.powi(30);
    assert_eq!(first(0.0, &[[1.0, large, 1.0, 1.0], [1.0, -large, 1.0, 1.0]]), 2.0);
    // They are added to each other before the former number: alone, either half of a unit would be lost.
    assert_eq!(first(2f32.powi(24), &[[1.0, 1.0, 1.0, 1.0]]), 2f32.powi(24) + 2.0);
    // Products are not rounded: 257/256 squared less 1 keeps its last bit.
    let near = 1.0 + 2f32.powi(-7);
    let sum = first(0.0, &[[-1.0, 0.0, 1.0, 0.0], [near, 0.0, near, 0.0]]);
    assert_eq!(sum, 2f32.powi(-6) + 2f32.powi(-14));
    // Subnormal numbers count as zero, as operands, sums and former contents.
    let tiny = f32::from_bits(0x0040_0000);
    assert_eq!(first(0.0, &[[tiny, 0.0, 2f32.powi(100), 0.0]]), 0.0);
    assert_eq!(first(0.0, &[[2f32.powi(-70), 0.0, 2f32.powi(-70), 0.0]]), 0.0);
    assert_eq!(first(tiny, &[[0.0; 4]]), 0.0);
}

/// The registers of the processor, where it has them, compute the same bits.
#[test]
fn the_processor_computes_what_registers_in_memory_do() {
    if !super::is_available() {
        eprintln!("skipped: this processor has no AMX-BF16");
        return;
    }
    let number = |i: usize| (((i * 7919) % 2003) as f32 / 1001.0 - 1.0).to_bits() >> 16;
    let fill = |seed: usize| -> Vec<u32> {
        (0..SIDE * WORDS).map(|i| number(2 * i + seed) | number(2 * i + seed + 1) << 16).collect()
    };
    let (a, b) = (fill(1), fill(1000));
    assert_eq!(product::<Hardware>(&a, &b), product::<Software>(&a, &b));
}

/// The bits of the product of two registers, added twice.
fn product<T: Tiles>(a: &[u32], b: &[u32]) -> Vec<u32> {
    let mut c = vec![0f32; SIDE * WORDS];
    T::configure();
    // SAFETY: the registers are configured, and all rows have their size.
    unsafe {
        T::zero::<0>();
        T::load::<1>(a.as_ptr(), ROW_BYTES);
        T::load::<2>(b.as_ptr(), ROW_BYTES);
        T::dot::<0, 1, 2>();
        T::dot::<0, 1, 2>();
        T::store::<0>(c.as_mut_ptr(), ROW_BYTES);
    }
    T::release();
    c.into_iter().map(f32::to_bits).collect()
}
