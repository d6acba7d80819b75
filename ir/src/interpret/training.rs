//! Loss scale, statistics of gradients, unscaling.

use super::call::Call;
use super::{Evaluate, Evaluated};
use crate::DType;
use crate::ops::{GradStats, LossScale, Unscale, UpdateLossScale, UpdateStep};

impl Evaluate for LossScale {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        Ok(vec![call.real(0, vec![call.scalar(0) * self.factor])])
    }
}

impl Evaluate for GradStats {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let (mut bad, mut squares) = (0u64, 0.0);
        for i in 0..call.inputs.len() {
            for g in call.floats(i).iter() {
                bad += u64::from(!g.is_finite());
                squares += g * g;
            }
        }
        Ok(vec![call.real(0, vec![bad as f64, squares])])
    }
}

impl Evaluate for Unscale {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let stats = call.floats(0);
        let [bad, squares, count, loss_sum] = [stats[0], stats[1], stats[2], stats[3]];
        let (scale, clip) = (call.scalar(1), call.scalar(2));
        let count = count.max(1.0);
        let unscale = self.capacity / count / scale;
        let norm = squares.sqrt() * unscale;
        let limit = if clip == 0.0 { 1.0 } else { (clip / (norm + 1e-6)).min(1.0) };
        let found_inf = if bad == 0.0 { 0.0 } else { 1.0 };
        Ok([unscale * limit, found_inf, norm, loss_sum / count]
            .into_iter()
            .enumerate()
            .map(|(i, x)| call.real(i, vec![x]))
            .collect())
    }
}

impl Evaluate for UpdateLossScale {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let [scale, tracker, found_inf, growth, backoff, interval] =
            [0, 1, 2, 3, 4, 5].map(|i| call.scalar(i));
        let (scale, tracker) = if found_inf != 0.0 {
            (scale * backoff, 0.0)
        } else if tracker + 1.0 >= interval {
            let grown = scale * growth;
            (if DType::F32.round(grown).is_finite() { grown } else { scale }, 0.0)
        } else {
            (scale, tracker + 1.0)
        };
        Ok(vec![call.real(0, vec![scale]), call.real(1, vec![tracker])])
    }
}

impl Evaluate for UpdateStep {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let (step, found_inf) = (call.scalar(0), call.scalar(1));
        Ok(vec![call.real(0, vec![if found_inf != 0.0 { step } else { step + 1.0 }])])
    }
}
