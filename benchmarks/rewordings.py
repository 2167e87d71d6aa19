"""The thirty questions of `draft_prompts`, each in three other ways, as a large model would write them.

Written by hand from the prompt that asks for them (`examples.apps.prompts.EXPAND`), before any search was made with
them: the bundled model's own rewordings are frames around the same words.
"""

REWORDINGS = {
    "What does an expression-less except clause match?": (
        "Which exceptions are caught by an except clause that names no exception?",
        "What is handled by a bare except?",
        "How does Python treat an except clause without a type?",
    ),
    "When is the finally clause executed?": (
        "At which point does the code in finally run?",
        "Is the finally block run when an exception occurs or the function returns?",
        "What guarantees does finally give about clean-up code?",
    ),
    "What happens if raise is written without an expression?": (
        "What does a bare raise statement do?",
        "How is the exception that is being handled raised again?",
        "Which error comes from raise when no exception is active?",
    ),
    "What does the from clause of a raise statement do?": (
        "How are exceptions chained explicitly?",
        "What is the meaning of raise ... from in Python?",
        "How is the __cause__ attribute of a new exception set?",
    ),
    "In which order does a with statement call the methods of a context manager?": (
        "When are __enter__ and __exit__ invoked?",
        "What are the steps in which a with block is executed?",
        "Which method of a context manager is called first?",
    ),
    "What can the inheritance list of a class definition hold?": (
        "What may stand in the parentheses behind the name of a class?",
        "How are base classes and a metaclass given in a class statement?",
        "Which arguments does a class definition accept?",
    ),
    "How are comparisons chained?": (
        "What does a < b < c mean?",
        "How does Python evaluate several comparison operators in a row?",
        "Is the middle operand of a chain of comparisons evaluated twice?",
    ),
    "How are sequences compared?": (
        "How does Python order lists and tuples?",
        "What is lexicographical comparison of collections?",
        "When are two lists equal?",
    ),
    "When are the arguments of a call evaluated?": (
        "Are argument expressions computed before the function is called?",
        "What is the evaluation order when a function is invoked?",
        "At what time does Python evaluate the parameters that are passed?",
    ),
    "What does the syntax *expression in a call mean?": (
        "How is an iterable unpacked into positional arguments?",
        "What does a star before an argument do?",
        "How are the elements of a list passed as separate arguments?",
    ),
    "When are default parameter values evaluated?": (
        "Are default arguments computed at each call or once?",
        "Why does a mutable default value keep its changes between calls?",
        "At which time is the expression of a default argument executed?",
    ),
    "What is a decorator expression?": (
        "How is a function wrapped with the @ syntax?",
        "When are decorators of a function evaluated and applied?",
        "What must the value behind an at sign be?",
    ),
    "What does an import statement without a from clause do?": (
        "What are the two steps of a basic import?",
        "Which name is bound when a module is imported?",
        "How does Python find and initialise a module?",
    ),
    "Which names does a wildcard import bind?": (
        "What does from module import * bring into the namespace?",
        "What is the role of __all__ for star imports?",
        "Which public names does a module export?",
    ),
    "Which characters are valid in an identifier?": (
        "What may the name of a variable consist of?",
        "Can names contain Unicode letters and digits?",
        "How are lexical rules for names defined?",
    ),
    "What is a code block?": (
        "Which pieces of a program are executed as a unit?",
        "Are modules, functions and classes blocks?",
        "In what is a block of code run?",
    ),
    "What is the scope of a name defined in a class block?": (
        "Are class variables visible inside of methods?",
        "Where can names that are bound in a class body be used?",
        "Does the scope of a class extend to its functions?",
    ),
    "What binds a name?": (
        "Which statements introduce names?",
        "How does a variable come into being?",
        "Which constructs are bindings: assignments, imports, parameters?",
    ),
    "What happens when a list of targets is assigned?": (
        "How does tuple unpacking work on the left-hand side?",
        "What does Python do with a starred target?",
        "How is an iterable distributed over several variables?",
    ),
    "What is an annotated assignment?": (
        "How is a type hint given for a variable?",
        "What is the combination of an annotation and an assignment in one statement?",
        "Where are annotations of variables stored?",
    ),
    "Where may an await expression be used?": (
        "Inside which functions is await permitted?",
        "How is a coroutine suspended on an awaitable?",
        "Can await stand outside of async def?",
    ),
    "What does the prefix of a string literal mean?": (
        "What is the difference between r, b, u and f strings?",
        "How does a letter before the quotes change a string?",
        "What makes a literal a bytes object or raw?",
    ),
    "How is a backslash escaped in a string literal?": (
        "Which escape sequences are recognised?",
        "How do I write a literal backslash?",
        "What do backslashes mean in raw strings?",
    ),
    "What does the conversion field of a replacement field do?": (
        "What do !r, !s and !a mean in a format string?",
        "How is a value coerced to text before it is formatted?",
        "Which function is called on a value by a conversion flag?",
    ),
    "What does the precision of a format specification say?": (
        "How many digits are shown behind the decimal point?",
        "What does the number after the dot in .2f control?",
        "How is the maximum width of a formatted string limited?",
    ),
    "What is the identity of an object?": (
        "What does id() return?",
        "How does the is operator compare two values?",
        "Which property of an object never changes once it is created?",
    ),
    "When are objects destroyed?": (
        "How does garbage collection work in Python?",
        "What happens to objects that cannot be reached any more?",
        "Are objects deleted explicitly?",
    ),
    "What happens when a sequence is subscripted with a negative index?": (
        "How do I get the last element of a list?",
        "Is the length added to an index below zero?",
        "How are negative subscripts interpreted?",
    ),
    "What does a dictionary display yield?": (
        "What is the result of a dict literal in braces?",
        "How are key and value pairs evaluated to build a mapping?",
        "What do duplicate keys in a dictionary expression do?",
    ),
    "What does the multiplication operator yield for sequences?": (
        "How is a list repeated?",
        "What is the result of a string times an integer?",
        "What does the asterisk operator do when one operand is a tuple?",
    ),
}
"""Question -> the other ways."""
