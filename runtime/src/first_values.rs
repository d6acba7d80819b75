//! Finds initial parameters with which no step computes anything: NaN in any, or infinity in one that trains. An infinity in one
//! that does not train may be a mask.

use crate::RunError;
use frit_ir::DType;
use frit_ir::plan::{ParamId, Plan};
use half::{bf16, f16};
use std::path::Path;

/// Index and value of the first NaN among floats in little-endian order or, if `infinity` counts too, of the first element
/// that is not finite. Nothing in other types.
pub fn not_finite(bytes: &[u8], dtype: DType, infinity: bool) -> Option<(usize, f64)> {
    let is_wrong = |x: f64| x.is_nan() || infinity && x.is_infinite();
    fn first<const N: usize>(
        bytes: &[u8],
        value: impl Fn([u8; N]) -> f64,
        is_wrong: impl Fn(f64) -> bool,
    ) -> Option<(usize, f64)> {
        let values = bytes.as_chunks::<N>().0.iter().map(|x| value(*x));
        values.enumerate().find(|(_, x)| is_wrong(*x))
    }
    match dtype {
        DType::F64 => first(bytes, f64::from_le_bytes, is_wrong),
        DType::F32 => first(bytes, |x| f64::from(f32::from_le_bytes(x)), is_wrong),
        DType::F16 => first(bytes, |x| f16::from_le_bytes(x).to_f64(), is_wrong),
        DType::BF16 => first(bytes, |x| bf16::from_le_bytes(x).to_f64(), is_wrong),
        _ => None,
    }
}

/// Refuses the elements from `first` on of a parameter, which are of this type and in `of`, if they are not finite.
///
/// # Errors
/// The first of them, with what to do.
pub(crate) fn check(
    plan: &Plan,
    param: ParamId,
    (bytes, dtype, first): (&[u8], DType, usize),
    of: Origin<'_>,
) -> Result<(), RunError> {
    match not_finite(bytes, dtype, trains(plan, param)) {
        None => Ok(()),
        Some((element, value)) => Err(of.refuse(&plan.params[param].name, first + element, value)),
    }
}

/// Whether a parameter is in a group that trains. No group of an evaluation does, so that only NaN counts there.
pub fn trains(plan: &Plan, param: ParamId) -> bool {
    plan.groups.iter().any(|g| g.trainable && g.segments.iter().any(|s| s.param == param))
}

/// More that can be done about such values, after a separator. A mask of infinities may be stored as a parameter.
pub fn of_masks(values: impl IntoIterator<Item = f64>) -> &'static str {
    match values.into_iter().any(f64::is_infinite) {
        true => {
            "; if it is a mask, which does not train, compile with its name in params.frozen or params.ignored"
        }
        false => "",
    }
}

/// Where initial values are from.
#[derive(Clone, Copy)]
pub(crate) enum Origin<'a> {
    /// A plan directory.
    Plan(&'a Path),
    /// A checkpoint.
    Checkpoint(&'a Path),
}

impl Origin<'_> {
    fn refuse(self, name: &str, element: usize, value: f64) -> RunError {
        let found = format!("`{name}` is {value} in element {element}");
        match self {
            Origin::Plan(path) => RunError::Plan {
                path: path.into(),
                reason: format!(
                    "the initial value of {found}; correct the weights of the model and compile it again, or give others with --weights{}",
                    of_masks([value])
                ),
            },
            Origin::Checkpoint(path) => {
                RunError::checkpoint(path, format!("{found}; continue from an earlier checkpoint"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn infinity_counts_where_it_is_said_to() {
        let f32s =
            |values: &[f32]| -> Vec<u8> { values.iter().flat_map(|x| x.to_le_bytes()).collect() };
        let masked = f32s(&[0.0, f32::NEG_INFINITY, f32::NAN]);
        let found = |infinity| not_finite(&masked, DType::F32, infinity).map(|(i, _)| i);
        assert_eq!((found(true), found(false)), (Some(1), Some(2)));
        assert_eq!(not_finite(&f32s(&[f32::MAX, -0.0]), DType::F32, true), None);
        let halves = [f16::ONE.to_le_bytes(), f16::INFINITY.to_le_bytes()].concat();
        assert_eq!(not_finite(&halves, DType::F16, true), Some((1, f64::INFINITY)));
        let brains = [bf16::MAX.to_le_bytes(), bf16::NEG_INFINITY.to_le_bytes()].concat();
        assert_eq!(not_finite(&brains, DType::BF16, true), Some((1, f64::NEG_INFINITY)));
        assert_eq!(not_finite(&[0xFF; 8], DType::I64, true), None);
        assert!(of_masks([f64::NAN, f64::NEG_INFINITY]).contains("params.frozen"));
        assert_eq!(of_masks([f64::NAN]), "");
    }
}
