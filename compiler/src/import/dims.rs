//! Size expressions: ONNX `dim_param`s and the shapes of JSON models.
//!
//! `batch*seq`, `2*(width + 1)`, `width/4` over named sizes; `//` is the same as `/`, and a division must be exact. Names
//! consist of letters, digits, `_` and `.`.

use frit_ir::Shape;
use frit_ir::shape::MAX_ELEMENTS;
use std::collections::{BTreeMap, BTreeSet};

/// Why an expression has no value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DimError {
    /// A name without a value.
    #[error("the dimension `{0}` has no value")]
    Unbound(String),
    /// Not an expression.
    #[error("`{0}` is not a size")]
    Syntax(String),
    /// Negative, inexact, or too large.
    #[error("`{0}` does not give a size: {1}")]
    Range(String, &'static str),
}

/// The value of `text` with these names bound; every name used is added to `used`.
///
/// # Errors
/// If it is no expression, a name is unbound, or the value is no size.
pub fn evaluate(
    text: &str,
    binds: &BTreeMap<String, usize>,
    used: &mut BTreeSet<String>,
) -> Result<usize, DimError> {
    // Exporters write names that are no expressions, such as `MatMul logits-dim`; a bound name wins.
    if let Some(&n) = binds.get(text.trim()) {
        used.insert(text.trim().into());
        return Ok(n);
    }
    let mut parser = Parser { text, rest: text.as_bytes(), binds, used, depth: 0 };
    let value = parser.sum()?;
    parser.blank();
    if !parser.rest.is_empty() {
        return Err(parser.syntax());
    }
    if value > MAX_ELEMENTS as i64 {
        return Err(DimError::Range(text.into(), "too large"));
    }
    usize::try_from(value).map_err(|_| DimError::Range(text.into(), "negative"))
}

struct Parser<'a> {
    text: &'a str,
    rest: &'a [u8],
    binds: &'a BTreeMap<String, usize>,
    used: &'a mut BTreeSet<String>,
    depth: usize,
}

impl Parser<'_> {
    fn syntax(&self) -> DimError {
        DimError::Syntax(self.text.into())
    }

    fn blank(&mut self) {
        self.rest = self.rest.trim_ascii_start();
    }

    fn eat(&mut self, symbol: u8) -> bool {
        self.blank();
        let found = self.rest.first() == Some(&symbol);
        if found {
            self.rest = &self.rest[1..];
        }
        found
    }

    fn large(&self) -> DimError {
        DimError::Range(self.text.into(), "too large")
    }

    fn sum(&mut self) -> Result<i64, DimError> {
        let mut left = self.product()?;
        loop {
            left = if self.eat(b'+') {
                left.checked_add(self.product()?).ok_or_else(|| self.large())?
            } else if self.eat(b'-') {
                left.checked_sub(self.product()?).ok_or_else(|| self.large())?
            } else {
                return Ok(left);
            }
        }
    }

    fn product(&mut self) -> Result<i64, DimError> {
        let mut left = self.factor()?;
        loop {
            if self.eat(b'*') {
                left = left.checked_mul(self.factor()?).ok_or_else(|| self.large())?;
            } else if self.eat(b'/') {
                self.eat(b'/');
                let right = self.factor()?;
                if right == 0 || left.checked_rem(right) != Some(0) {
                    return Err(DimError::Range(self.text.into(), "the division is not exact"));
                }
                left /= right;
            } else {
                return Ok(left);
            }
        }
    }

    fn factor(&mut self) -> Result<i64, DimError> {
        if self.eat(b'(') {
            self.depth += 1;
            if self.depth > 32 {
                return Err(self.syntax());
            }
            let value = self.sum()?;
            self.depth -= 1;
            return if self.eat(b')') { Ok(value) } else { Err(self.syntax()) };
        }
        self.blank();
        let word = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.') || *b >= 0x80;
        let n = self.rest.iter().take_while(|b| word(b)).count();
        let (token, rest) = self.rest.split_at(n);
        self.rest = rest;
        let token = String::from_utf8_lossy(token).into_owned();
        match token.bytes().next() {
            None => Err(self.syntax()),
            Some(b'0'..=b'9') => token.parse().map_err(|_| self.syntax()),
            Some(_) => match self.binds.get(&token) {
                Some(&n) => {
                    self.used.insert(token);
                    i64::try_from(n).map_err(|_| self.large())
                }
                None => Err(DimError::Unbound(token)),
            },
        }
    }
}

/// The number of elements, unless no tensor may have so many.
pub(crate) fn checked_numel(dims: &[usize]) -> Option<usize> {
    Shape::from(dims).checked_numel()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn eval(text: &str) -> Result<usize, DimError> {
        let binds = BTreeMap::from([("batch".to_string(), 8), ("seq".to_string(), 32)]);
        evaluate(text, &binds, &mut BTreeSet::new())
    }

    #[test]
    fn expressions_have_values() {
        assert_eq!(eval("batch*seq"), Ok(256));
        assert_eq!(eval("batch + 1"), Ok(9));
        assert_eq!(eval("2*(seq - 2)/4"), Ok(15));
        assert_eq!(eval("seq // 8"), Ok(4));
        assert_eq!(eval("7"), Ok(7));
    }

    #[test]
    fn what_is_no_size_is_refused() {
        assert_eq!(eval("n*2"), Err(DimError::Unbound("n".into())));
        assert!(matches!(eval("seq/7"), Err(DimError::Range(..))));
        assert!(matches!(eval("batch - seq"), Err(DimError::Range(..))));
        assert!(matches!(eval("batch +"), Err(DimError::Syntax(_))));
        assert!(matches!(eval("4 5"), Err(DimError::Syntax(_))));
        assert!(matches!(eval("99999999999*99999999999"), Err(DimError::Range(..))));
        assert!(matches!(eval(&"(".repeat(1000)), Err(DimError::Syntax(_))));
    }

    #[test]
    fn huge_shapes_are_refused_even_if_empty() {
        assert_eq!(checked_numel(&[2, 3]), Some(6));
        assert_eq!(checked_numel(&[0, 3]), Some(0));
        assert_eq!(checked_numel(&[0, usize::MAX, 2]), None);
        assert_eq!(checked_numel(&[1 << 21, 1 << 21]), None);
    }
}
