//! L16: plans that low precision is predicted not to speed up.

use super::Findings;
use crate::cost::{Device, step_us, step_us_in_f32};
use frit_ir::Origin;
use frit_ir::plan::Plan;

/// Below this, low precision is not worth its roundings.
const WORTH: f64 = 1.1;

pub(super) fn lint(plan: &Plan, device: &Device, found: &mut Findings) {
    if !plan.compute_dtype.is_low_precision() {
        return;
    }
    let (own, wide) = (step_us(plan), step_us_in_f32(plan, device));
    let gain = wide / own.max(f64::MIN_POSITIVE);
    if gain < WORTH {
        let message = format!(
            "{} is predicted to make the work of a step {gain:.2} times as fast as fp32",
            plan.compute_dtype
        );
        found.add("L16", &Origin::none(), "", message);
    }
}
