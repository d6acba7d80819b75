//! Mutations of text by token: each is replaced by one of its class, and lines are moved.

use super::{bytes, changes, number, pick};
use crate::machine::Random;

/// What tokens may stand for each other.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Number,
    Word,
    Value,
    Quoted,
    Sign,
}

#[derive(Clone)]
struct Token {
    class: Class,
    text: String,
}

/// Makes a few changes, some with tokens and lines of another text; changes bytes if either is no text.
pub(in crate::fuzz) fn change(random: &mut Random, input: &mut Vec<u8>, other: &[u8]) {
    let (Ok(text), Ok(other_text)) = (std::str::from_utf8(input), std::str::from_utf8(other))
    else {
        return bytes::change(random, input, other);
    };
    let mut lines: Vec<String> = text.lines().map(String::from).collect();
    let others: Vec<&str> = other_text.lines().collect();
    for _ in 0..changes(random) {
        if lines.is_empty() {
            break;
        }
        let (at, to) = (random.below(lines.len()), random.below(lines.len()));
        match random.below(10) {
            0 => drop(lines.remove(at)),
            1 => lines.insert(to, lines[at].clone()),
            2 => lines.swap(at, to),
            3 if !others.is_empty() => lines.insert(to, pick(random, &others).to_string()),
            4..=6 => change_token(random, &mut lines, at, text),
            _ => change_token(random, &mut lines, at, other_text),
        }
    }
    *input = (lines.join("\n") + "\n").into_bytes();
}

/// Replaces a token of a line by one of the same class from `donor`, or a number by another.
fn change_token(random: &mut Random, lines: &mut [String], at: usize, donor: &str) {
    let mut tokens = tokens(&lines[at]);
    if tokens.is_empty() {
        return;
    }
    let i = random.below(tokens.len());
    let class = tokens[i].class;
    tokens[i].text = match tokens[i].text.parse::<i64>() {
        Ok(old) if random.below(2) == 0 => number(random, old).to_string(),
        _ => {
            let donors = self::tokens(donor);
            let alike: Vec<&Token> = donors.iter().filter(|t| t.class == class).collect();
            match alike.is_empty() {
                true => String::new(),
                false => pick(random, &alike).text.clone(),
            }
        }
    };
    lines[at] = tokens.into_iter().map(|t| t.text).collect();
}

fn tokens(text: &str) -> Vec<Token> {
    let mut found: Vec<Token> = Vec::new();
    let mut quoted = false;
    for c in text.chars() {
        let is_word = c.is_alphanumeric() || c == '_' || c == '.';
        let last = found.last_mut();
        match last {
            Some(token)
                if quoted
                    || (is_word && token.class != Class::Sign && token.class != Class::Quoted) =>
            {
                token.text.push(c);
                quoted &= c != '"';
            }
            _ => {
                quoted = c == '"';
                let class = match c {
                    '"' => Class::Quoted,
                    '%' => Class::Value,
                    c if c.is_ascii_digit() => Class::Number,
                    _ if is_word => Class::Word,
                    _ => Class::Sign,
                };
                found.push(Token { class, text: c.into() });
            }
        }
    }
    found
}
