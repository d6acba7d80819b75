//! Leaves. Only constants have a value of their own.

use super::call::Call;
use super::{EvalError, Evaluate, Evaluated};
use crate::ops::{Constant, Hyper, Input, Param, State};

impl Evaluate for Constant {
    fn evaluate(&self, _: &Call<'_>) -> Evaluated {
        Ok(vec![self.value.clone()])
    }
}

macro_rules! from_outside {
    ($($leaf:ident = $name:literal),*) => {$(
        impl Evaluate for $leaf {
            fn evaluate(&self, _: &Call<'_>) -> Evaluated {
                Err(EvalError::Leaf($name))
            }
        }
    )*};
}

from_outside!(Input = "input", Param = "param", State = "state", Hyper = "hyper");
