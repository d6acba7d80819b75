//! Rounding and order of the element types.

use super::DType;

#[test]
fn floats_round_to_nearest_with_ties_to_even() {
    let ulp = 1.0 / 128.0;
    // Halfway between neighbors of bf16: to the one with an even last bit.
    assert_eq!(DType::BF16.round(1.0 + 0.5 * ulp), 1.0);
    assert_eq!(DType::BF16.round(1.0 + 1.5 * ulp), 1.0 + 2.0 * ulp);
    assert_eq!(DType::BF16.round(1.0 + 0.51 * ulp), 1.0 + ulp);
    assert_eq!(DType::F16.round(1.0 + 0.5 / 1024.0), 1.0);
    assert_eq!(DType::F32.round(1.0 + f64::from(f32::EPSILON) * 0.75), 1.0 + 2f64.powi(-23));
    assert_eq!(DType::F64.round(0.1), 0.1);
}

#[test]
fn a_float_is_rounded_once() {
    // Just above halfway in bf16; rounding to f32 first would make it a tie and lose the excess.
    let x = 1.0 + 1.0 / 256.0 + 2f64.powi(-40);
    assert_eq!(DType::BF16.round(x), 1.0 + 1.0 / 128.0);
    let x = 1.0 + 1.0 / 2048.0 + 2f64.powi(-40);
    assert_eq!(DType::F16.round(x), 1.0 + 1.0 / 1024.0);
}

#[test]
fn rounding_keeps_every_value_of_the_type() {
    for bits in 0..=u16::MAX {
        for (dtype, x) in [
            (DType::F16, half::f16::from_bits(bits).to_f64()),
            (DType::BF16, half::bf16::from_bits(bits).to_f64()),
        ] {
            let y = dtype.round(x);
            assert!(y.to_bits() == x.to_bits() || (x.is_nan() && y.is_nan()), "{dtype} {x}");
        }
    }
}

#[test]
fn rounding_goes_to_the_nearer_neighbor() {
    for bits in 0..0x7bffu16 {
        let (low, high) =
            (half::f16::from_bits(bits).to_f64(), half::f16::from_bits(bits + 1).to_f64());
        let middle = (low + high) / 2.0;
        assert_eq!(DType::F16.round(middle), if bits % 2 == 0 { low } else { high });
        assert_eq!(DType::F16.round(middle.next_down()), low);
        assert_eq!(DType::F16.round(-middle.next_up()), -high);
    }
}

#[test]
fn floats_overflow_underflow_and_keep_nan() {
    assert_eq!(DType::F16.round(65504.0), 65504.0);
    assert_eq!(DType::F16.round(65520.0), f64::INFINITY);
    assert_eq!(DType::F16.round(2f64.powi(-24)), 2f64.powi(-24));
    assert_eq!(DType::F16.round(2f64.powi(-26)), 0.0);
    assert_eq!(DType::F32.round(-1e300), f64::NEG_INFINITY);
    assert_eq!(DType::BF16.round(-0.0).to_bits(), (-0.0f64).to_bits());
    for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
        assert!(dtype.round(f64::NAN).is_nan());
        assert_eq!(dtype.round(f64::INFINITY), f64::INFINITY);
    }
}

#[test]
fn integers_truncate_and_saturate() {
    assert_eq!(DType::I32.round(-2.9), -2.0);
    assert_eq!(DType::U8.round(-3.0), 0.0);
    assert_eq!(DType::U8.round(256.0), 255.0);
    assert_eq!(DType::Bool.round(-0.5), 1.0);
}

#[test]
fn every_value_of_a_type_survives_its_widening() {
    for narrow in DType::ALL {
        for wide in DType::ALL.into_iter().filter(|w| narrow.widens_to(*w)) {
            assert!(wide.size() >= narrow.size(), "{narrow} to {wide}");
            if narrow.is_float() && wide.is_float() {
                assert!(wide.mantissa_bits() >= narrow.mantissa_bits(), "{narrow} to {wide}");
            }
        }
    }
    for i in 0..=255u8 {
        assert_eq!(DType::F16.round(f64::from(i)), f64::from(i));
    }
    assert!(!DType::F16.widens_to(DType::BF16) && !DType::BF16.widens_to(DType::F16));
}

#[test]
fn names_are_read_back() {
    for dtype in DType::ALL {
        assert_eq!(dtype.name().parse(), Ok(dtype));
    }
    assert_eq!("fp16".parse(), Ok(DType::F16));
    assert!("f17".parse::<DType>().is_err());
}
