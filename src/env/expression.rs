//! Arithmetic on whole numbers: read with a grammar, worked out exactly, nothing else understood.
//!
//! ```text
//! sum     = product (("+" | "-") product)*
//! product = signed  (("*" | "/") signed)*
//! signed  = ("+" | "-")* (number | "(" sum ")")
//! number  = "0" | [1-9][0-9]*
//! ```

use super::Rational;

/// How deep parentheses may nest.
const MAX_DEPTH: usize = 64;

/// An expression that was read, in postfix order, so that no depth of it costs stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expression {
    items: Vec<Item>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Item {
    Number(u64),
    Negate,
    Add,
    Subtract,
    Multiply,
    Divide,
}

/// Why a text is no expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExpressionError {
    /// Something else stands where a number, a sign or a parenthesis must.
    #[error("expected {expected} at byte {at}")]
    Unexpected {
        /// What the grammar wants.
        expected: &'static str,
        /// Where.
        at: usize,
    },
    /// A number begins with a zero that has no place there, or does not fit into 64 bits.
    #[error("expected a whole number below 2^64, without leading zeros, at byte {at}")]
    Number {
        /// Where it begins.
        at: usize,
    },
    /// Parentheses nest too deep.
    #[error("expected at most {MAX_DEPTH} nested parentheses, found more at byte {at}")]
    TooDeep {
        /// Where.
        at: usize,
    },
}

impl Expression {
    /// Reads an expression; white space between its parts does not matter.
    ///
    /// # Errors
    /// If the text is none.
    pub fn parse(text: &str) -> Result<Self, ExpressionError> {
        let mut parser = Parser { text: text.as_bytes(), at: 0, depth: 0, items: Vec::new() };
        parser.sum()?;
        match parser.peek() {
            None => Ok(Self { items: parser.items }),
            Some(_) => Err(parser.unexpected("an operator or the end")),
        }
    }

    /// The numbers in it, in their order.
    pub fn numbers(&self) -> Vec<u64> {
        let number = |item: &Item| match item {
            Item::Number(number) => Some(*number),
            _ => None,
        };
        self.items.iter().filter_map(number).collect()
    }

    /// What it comes to. `None` after a division by zero, or if a step exceeds 128 bits, which it
    /// cannot while the product of all (number + 1) fits: with |p| + |q| as the size of p/q, a sum, a
    /// product and a quotient are at most as large as the product of their sizes.
    pub fn value(&self) -> Option<Rational> {
        let mut stack: Vec<Rational> = Vec::new();
        for item in &self.items {
            let value = match item {
                Item::Number(number) => Rational::whole(*number),
                Item::Negate => stack.pop()?.negate()?,
                operator => {
                    let (right, left) = (stack.pop()?, stack.pop()?);
                    match operator {
                        Item::Add => left.plus(right),
                        Item::Subtract => left.minus(right),
                        Item::Multiply => left.times(right),
                        _ => left.over(right),
                    }?
                }
            };
            stack.push(value);
        }
        stack.pop()
    }
}

struct Parser<'a> {
    text: &'a [u8],
    at: usize,
    depth: usize,
    items: Vec<Item>,
}

impl Parser<'_> {
    /// The next byte that is no white space.
    fn peek(&mut self) -> Option<u8> {
        while self.text.get(self.at).is_some_and(u8::is_ascii_whitespace) {
            self.at += 1;
        }
        self.text.get(self.at).copied()
    }

    fn unexpected(&self, expected: &'static str) -> ExpressionError {
        ExpressionError::Unexpected { expected, at: self.at }
    }

    /// The operator that comes next, if it is one of these.
    fn operator(&mut self, known: [(u8, Item); 2]) -> Option<Item> {
        let next = self.peek()?;
        let (_, item) = known.into_iter().find(|(sign, _)| *sign == next)?;
        self.at += 1;
        Some(item)
    }

    fn sum(&mut self) -> Result<(), ExpressionError> {
        self.product()?;
        while let Some(item) = self.operator([(b'+', Item::Add), (b'-', Item::Subtract)]) {
            self.product()?;
            self.items.push(item);
        }
        Ok(())
    }

    fn product(&mut self) -> Result<(), ExpressionError> {
        self.signed()?;
        while let Some(item) = self.operator([(b'*', Item::Multiply), (b'/', Item::Divide)]) {
            self.signed()?;
            self.items.push(item);
        }
        Ok(())
    }

    fn signed(&mut self) -> Result<(), ExpressionError> {
        let mut negative = false;
        while let Some(sign @ (b'+' | b'-')) = self.peek() {
            negative ^= sign == b'-';
            self.at += 1;
        }
        match self.peek() {
            Some(b'(') => self.parenthesis()?,
            Some(b'0'..=b'9') => self.number()?,
            _ => return Err(self.unexpected("a number, a sign or an opening parenthesis")),
        }
        if negative {
            self.items.push(Item::Negate);
        }
        Ok(())
    }

    fn parenthesis(&mut self) -> Result<(), ExpressionError> {
        if self.depth == MAX_DEPTH {
            return Err(ExpressionError::TooDeep { at: self.at });
        }
        self.at += 1;
        self.depth += 1;
        self.sum()?;
        if self.peek() != Some(b')') {
            return Err(self.unexpected("an operator or a closing parenthesis"));
        }
        self.at += 1;
        self.depth -= 1;
        Ok(())
    }

    fn number(&mut self) -> Result<(), ExpressionError> {
        let start = self.at;
        let mut number = Some(0_u64);
        while let Some(digit @ b'0'..=b'9') = self.text.get(self.at) {
            number = number
                .and_then(|number| number.checked_mul(10)?.checked_add(u64::from(digit - b'0')));
            self.at += 1;
        }
        let has_leading_zero = self.text[start] == b'0' && self.at > start + 1;
        let number = number.filter(|_| !has_leading_zero);
        self.items.push(Item::Number(number.ok_or(ExpressionError::Number { at: start })?));
        Ok(())
    }
}
