//! Patterns over dotted names of parameters, scopes and units.
//!
//! `*` matches any characters within one part of a name, `?` matches one character, and `**` matches any text
//! across parts. A part that is `**` alone also matches no part at all, so `**.bias` matches `bias` and `h.**`
//! matches `h`.

/// A token of a pattern.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Token {
    /// This character.
    Literal(char),
    /// `?`: any character but a dot.
    One,
    /// `*`: any characters but dots.
    Star,
    /// `**`: any text.
    Any,
    /// `**.`: any number of parts before another one.
    Before,
    /// `.**`: any number of parts after another one.
    After,
}

/// Whether the pattern matches the whole name.
pub fn matches(pattern: &str, name: &str) -> bool {
    let name: Vec<char> = name.chars().collect();
    // Whether what is read of the pattern covers the first j characters of the name.
    let mut covers = vec![false; name.len() + 1];
    covers[0] = true;
    for token in tokens(pattern) {
        covers = after(token, &covers, &name);
    }
    covers[name.len()]
}

/// Whether any of the patterns matches the whole name.
pub fn any(patterns: &[String], name: &str) -> bool {
    patterns.iter().any(|p| matches(p, name))
}

fn tokens(pattern: &str) -> Vec<Token> {
    let mut tokens = Vec::new();
    let parts: Vec<&str> = pattern.split('.').collect();
    for (i, part) in parts.iter().enumerate() {
        let is_last = i + 1 == parts.len();
        match (*part == "**", is_last, tokens.last()) {
            (true, false, _) => {
                tokens.push(Token::Before);
                continue;
            }
            (true, true, Some(Token::Literal('.'))) => {
                tokens.pop();
                tokens.push(Token::After);
            }
            _ => tokens.extend(within(part)),
        }
        if !is_last {
            tokens.push(Token::Literal('.'));
        }
    }
    tokens
}

/// The tokens of one part.
fn within(part: &str) -> Vec<Token> {
    let mut tokens = Vec::new();
    for c in part.chars() {
        match (c, tokens.last()) {
            ('*', Some(Token::Star | Token::Any)) => {
                tokens.pop();
                tokens.push(Token::Any);
            }
            ('*', _) => tokens.push(Token::Star),
            ('?', _) => tokens.push(Token::One),
            _ => tokens.push(Token::Literal(c)),
        }
    }
    tokens
}

/// The prefixes of a name that match with one more token.
fn after(token: Token, covers: &[bool], name: &[char]) -> Vec<bool> {
    let mut next = vec![false; covers.len()];
    // Whether a text that the token covers in part began before, and for `After` went on with a dot.
    let (mut began, mut dotted) = (false, false);
    for (j, &here) in covers.iter().enumerate() {
        let last = j.checked_sub(1).map(|i| name[i]);
        let before = j > 0 && covers[j - 1];
        began |= before;
        dotted |= before && last == Some('.');
        next[j] = match token {
            Token::Literal(c) => before && last == Some(c),
            Token::One => before && last != Some('.'),
            Token::Star => here || (j > 0 && next[j - 1] && last != Some('.')),
            Token::Any => here || began,
            Token::Before => here || (began && last == Some('.')),
            Token::After => here || dotted,
        };
    }
    next
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_and_what_they_cover() {
        for (pattern, covered, others) in [
            ("fc", &["fc"][..], &["fc1", "h.fc", "fc.weight", ""][..]),
            ("", &[""], &["a"]),
            ("*", &["", "fc"], &["h.fc"]),
            ("*.bias", &["fc.bias"], &["bias", "h.fc.bias"]),
            ("h.*.attn", &["h.3.attn"], &["h.3.4.attn", "h.attn"]),
            ("ln_*", &["ln_f", "ln_"], &["lm_head", "ln_f.weight"]),
            ("*a*b", &["ab", "xaxb"], &["ba", "a.b"]),
            ("h.*.ln_?.weight", &["h.11.ln_1.weight"], &["h.11.mlp.ln_1.weight", "h.1.ln_.weight"]),
            ("h?0", &["h_0"], &["h.0"]),
            ("**", &["", "fc", "h.0.attn.weight"], &[]),
            ("**.bias", &["bias", "fc.bias", "h.fc.bias"], &["fc.bias_2", "h.mybias", "bias.fc"]),
            ("h.**", &["h", "h.0", "h.0.attn"], &["h2", "g.h"]),
            ("h.**.bias", &["h.bias", "h.0.bias", "h.0.fc.bias"], &["bias", "h.0", "h2.bias"]),
            ("**.h.11.**", &["h.11", "h.11.w", "t.h.11.w"], &["h.1.w", "t.h.110.w", "xh.11"]),
            ("**.**", &["", "h", "h.0.w"], &[]),
            ("**bias", &["bias", "mybias", "h.fc.bias"], &["bias.h"]),
            ("h.0**", &["h.0", "h.01", "h.0.w.x"], &["h.1"]),
            ("ä?.*", &["äö.ü"], &["ä.ü"]),
        ] {
            for name in covered {
                assert!(matches(pattern, name), "`{pattern}` covers `{name}`");
            }
            for name in others {
                assert!(!matches(pattern, name), "`{pattern}` does not cover `{name}`");
            }
        }
        assert!(any(&["a".into(), "b.*".into()], "b.c") && !any(&[], "a"));
    }
}
