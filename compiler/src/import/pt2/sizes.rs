//! Sizes as PyTorch writes them, `Mul(Integer(4), Symbol('s17', positive=True, integer=True))`, in the notation of
//! [`crate::import::dims`]: `(4*s17)`.

/// Levels of functions inside one another at most.
const MAX_DEPTH: usize = 64;

/// The expression in infix notation; `None` if it has functions other than sums, products and floored divisions.
pub(super) fn infix(text: &str) -> Option<String> {
    let mut rest = text;
    let found = expression(&mut rest, 0)?;
    rest.trim().is_empty().then_some(found)
}

fn expression(rest: &mut &str, depth: usize) -> Option<String> {
    let text = rest.trim_start();
    let end = text
        .find(|c: char| !(c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | '\'')))
        .unwrap_or(text.len());
    let (head, tail) = text.split_at(end);
    let Some(inside) = tail.strip_prefix('(') else {
        // A bare number or name.
        *rest = tail;
        let plain = !head.is_empty() && head.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        return plain.then(|| head.to_string());
    };
    if depth >= MAX_DEPTH {
        return None;
    }
    match head {
        "Integer" | "Symbol" => {
            let (arguments, after) = inside.split_once(')')?;
            *rest = after;
            let first = arguments.split(',').next()?.trim().trim_matches('\'');
            let negative = first.strip_prefix('-');
            let digits = negative.unwrap_or(first);
            let plain =
                !digits.is_empty() && digits.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
            plain
                .then(|| if negative.is_some() { format!("(0 - {digits})") } else { digits.into() })
        }
        "Add" | "Mul" | "FloorDiv" => {
            *rest = inside;
            let mut operands = Vec::new();
            loop {
                operands.push(expression(rest, depth + 1)?);
                *rest = rest.trim_start();
                if let Some(after) = rest.strip_prefix(',') {
                    *rest = after;
                } else {
                    *rest = rest.strip_prefix(')')?;
                    break;
                }
            }
            let operator = match head {
                "Add" => " + ",
                "Mul" => "*",
                _ => "/",
            };
            Some(format!("({})", operands.join(operator)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_rewritten() {
        for (text, expected) in [
            ("Symbol('s17', positive=True, integer=True)", Some("s17")),
            ("Mul(Integer(4), Symbol('s17', integer=True))", Some("(4*s17)")),
            ("Add(Mul(Integer(2), Symbol('a')), Integer(-1))", Some("((2*a) + (0 - 1))")),
            ("FloorDiv(Symbol('a'), Integer(2))", Some("(a/2)")),
            ("s0", Some("s0")),
            ("Max(Integer(1), Symbol('a'))", None),
            ("Mul(Integer(4)", None),
            ("Symbol('a'", None),
            ("", None),
        ] {
            assert_eq!(infix(text).as_deref(), expected, "{text}");
        }
        assert_eq!(infix(&"Add(".repeat(100_000)), None);
    }
}
